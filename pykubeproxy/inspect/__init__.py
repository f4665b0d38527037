"""The views behind dump-rules, explain, trace, diff and check: values in, text or a JSON document out.

Each command has a package with `model`, `render_json` and `render_text`; the modules beside them read services from
rules.
"""
