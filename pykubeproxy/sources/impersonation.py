"""The headers that name the user to impersonate."""

import string

from pykubeproxy.sources.kubeconfig import KubeconfigUser

# The characters of a header's name, except "%", which escapes the others.
_LEGAL = frozenset((string.ascii_letters + string.digits + "!#$&'*+-.^_`|~").encode())


def impersonation_headers(user: KubeconfigUser) -> tuple[tuple[str, str], ...]:
    """Return the headers for `as` and its siblings in a kubeconfig, one for each group and value; none without `as`."""
    if not user.as_:
        return ()
    headers = [("Impersonate-User", user.as_)]
    if user.as_uid:
        headers.append(("Impersonate-Uid", user.as_uid))
    headers += [("Impersonate-Group", group) for group in user.as_groups]
    for key, values in user.as_user_extra.items():
        headers += [(f"Impersonate-Extra-{_escaped(key)}", value) for value in values]
    # The client encodes headers as Latin-1, the server decodes them as UTF-8.
    return tuple((name, value.encode().decode("latin-1")) for name, value in headers)


def _escaped(key: str) -> str:
    return "".join(chr(byte) if byte in _LEGAL else f"%{byte:02X}" for byte in key.encode())
