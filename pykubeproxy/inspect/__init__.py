"""Answer questions about 1 to n nodes: `NodeState` values in (`node.py`), a report out (`report/document.py`).

Each command has a package or a module. `packets/` walks packets through rules, for `trace` and `diff`.
"""
