"""`virtlun completion`: what TAB completes, in a shell: commands, options, and names of volumes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import click
from click.shell_completion import CompletionItem, get_completion_class

from plugin.targets import chosen
from pydataplane.client import Client
from pydataplane.domain.errors import ConfigError
from pydataplane.errors import TargetError, VolumeError
from pydataplane.lvstores import Lvstores
from pydataplane.volumes import Volumes

SHELLS = ("bash", "fish", "zsh")
COMMAND = "virtlun"
ANSWER_S = 2.0
"""How long TAB waits for a target, seconds."""


@click.command(short_help="Print what has a shell complete commands and names.")
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print what has a SHELL complete commands, options and names of volumes.

    \b
      bash: virtlun completion bash >/etc/bash_completion.d/virtlun
      zsh:  virtlun completion zsh >"${fpath[1]}/_virtlun"
      fish: virtlun completion fish >~/.config/fish/completions/virtlun.fish
    """  # noqa: D301 (click's mark)
    made = get_completion_class(shell)
    assert made is not None, "one of click's own"
    root = click.get_current_context().find_root().command
    click.echo(made(root, {}, COMMAND, f"_{COMMAND.upper()}_COMPLETE").source())


def _names(context: click.Context, incomplete: str, of: Callable[[Client], list[str]]) -> list[str]:
    """Returns the names that begin so; none where no target tells them."""
    given = context.find_root().params
    with suppress(ConfigError, TargetError, VolumeError, OSError):
        _, _, socket = chosen(
            *(given.get(name) for name in ("config_path", "socket", "target_name"))
        )
        return [name for name in of(Client(socket, ANSWER_S)) if name.startswith(incomplete)]
    return []


def volumes(context: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Returns the volumes, snapshots among them, whose path begins so."""
    found = _names(context, incomplete, lambda asked: [v.path for v in Volumes(asked).volumes()])
    return [CompletionItem(path) for path in found]


def lvstores(context: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Returns the lvstores and pools whose name begins so."""
    found = _names(context, incomplete, lambda asked: [s.name for s in Lvstores(asked).lvstores()])
    return [CompletionItem(name) for name in found]
