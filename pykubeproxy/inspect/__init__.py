"""The views behind dump-rules, explain, trace, diff and check: values in, text or a JSON document out.

Each command has a package that makes values and renders them; the modules beside them read services from rules.
"""
