"""The target's JSON-RPC as its callers see it. Standard library only: the hook is made of it.

methods.pyi, made from schemas/rpc, has its types: `call` takes the methods that there are, with the
parameters of each, and returns what each returns (`methods.Bdev` and the like, which type checkers
alone know). Another name, parameter or field is an error of `make lint`, and the hook, which starts
before each VM, need not load what it knows by then.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any


class Rpc(ABC):
    """Calls methods of a target: pydataplane.client.Client, the hook's own, or a test's."""

    @abstractmethod
    def call_raw(self, method: str, **params: Any) -> Any:
        """Calls a method that is not known before run time; parameters that are None are left out.

        Raises:
            RpcError: the target refused; `code` and `message` are its own.
            TargetError: another one; it does not answer.
        """

    def call(self, method: str, /, **params: Any) -> Any:
        """Calls a method of schemas/rpc, and returns its result; otherwise as `call_raw`."""
        return self.call_raw(method, **params)


class BatchRpc(Rpc):
    """One that makes many calls in few exchanges."""

    @abstractmethod
    def call_for_each_raw(
        self, method: str, names: Sequence[str], params: Callable[[str], Mapping[str, Any]]
    ) -> dict[str, Any]:
        """`call_for_each`, of a method that is not known before run time."""

    def call_for_each(
        self, method: str, names: Sequence[str], params: Callable[[str], Mapping[str, Any]]
    ) -> dict[str, Any]:
        """Calls `method` about each of `names` with `params` of it; returns the results by name.

        Those that the target does not have (ENODEV) are left out.

        Raises:
            RpcError: another refusal of one of them.
            TargetError: it does not answer.
        """
        return self.call_for_each_raw(method, names, params)
