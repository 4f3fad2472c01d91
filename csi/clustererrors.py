"""What the API server did not do: one sentence with the object, the cause and the next step.

ClusterError
+-- NotFoundError      the object (or its whole kind) is not there
+-- ConflictError      somebody else changed it meanwhile: look again
+-- ForbiddenError     the service account may not do it: see the RBAC manifest
+-- RefusedError       the server does not accept what was sent
+-- UnreachableError   no answer, or the server cannot answer now: try again later
+-- ExpiredError       the server has forgotten where a watch was: list anew
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import httpx2
import msgspec
from lightkube import ApiError
from lightkube.core.exceptions import ConfigError

from csi.kinds import Kind

NAME = re.compile(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?")
"""What an object's name can be (RFC 1123). Names become parts of paths, and some are users' words:
with `..` in it one would lead to another user's object."""


class ClusterError(Exception):
    """The API server did not do what was asked; the text is one sentence."""


class NotFoundError(ClusterError):
    """The object is not there, or the server does not know its kind."""


class ConflictError(ClusterError):
    """Another change came first, or an object of this name exists."""


class ForbiddenError(ClusterError):
    """The service account may not do it, or is not known."""


class RefusedError(ClusterError):
    """The server does not accept the object."""


class UnreachableError(ClusterError):
    """The API server does not answer, or cannot now."""


class ExpiredError(ClusterError):
    """The server no longer knows what happened since the version of a watch (410)."""


ERRORS: dict[int, tuple[type[ClusterError], str]] = {
    401: (ForbiddenError, "the server does not know this account: check the service account"),
    403: (ForbiddenError, "compare the account's rights with examples/kubernetes/rbac.yaml"),
    404: (NotFoundError, "is it there, and in this namespace?"),
    409: (ConflictError, "it is looked at again and tried once more"),
    410: (ExpiredError, "it is listed anew"),
}


@contextmanager
def sentences(
    verb: str, kind: Kind, name: str = "", namespace: str | None = None
) -> Iterator[None]:
    """Turns the library's failures of a `with` block into ours.

    Raises:
        ClusterError: "cannot `verb` ...", of the class that the server's answer asks for.
    """
    about = "/".join(part for part in (namespace, name) if part)
    subject = f"cannot {verb} {kind.name} {about}" if about else f"cannot {verb} {kind.plural}"
    for part in (namespace, name):
        if part and not NAME.fullmatch(part):
            raise NotFoundError(
                f"cannot {verb} {kind.name} {part[:64]!r}: no object has such a name; correct it"
            )
    try:
        yield
    except httpx2.HTTPStatusError as error:
        raise _explain(subject, kind, error) from error
    except (httpx2.HTTPError, httpx2.StreamError, msgspec.MsgspecError, OSError) as error:
        said = str(error) or type(error).__name__
        raise UnreachableError(
            f"{subject}: the API server does not answer ({said}): it is tried again"
        ) from error
    except (ConfigError, RuntimeError) as error:
        raise UnreachableError(f"{subject}: {error}; it is tried again") from error


def _explain(subject: str, kind: Kind, error: httpx2.HTTPStatusError) -> ClusterError:
    """Returns our error for an answer that is not a success."""
    status = error.status if isinstance(error, ApiError) else None  # None: not even JSON
    code = (status and status.code) or error.response.status_code
    known = status is not None and status.details is not None and bool(status.details.name)
    made, hint = ERRORS.get(code, (RefusedError, "see the message"))
    if code >= 500 or code == 429:
        made, hint = UnreachableError, "it is tried again"
    if code == 404 and not known:
        return made(f"{subject}: the server knows no {kind.plural}; {kind.hint or hint}")
    said = status.message if status and status.message else f"HTTP status {code}"
    return made(f"{subject}: {said.rstrip('.')}; {hint}")
