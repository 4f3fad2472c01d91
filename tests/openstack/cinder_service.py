"""Cinder's services in one process, with its REST API; run by a Python that has Cinder.

    python cinder_service.py CINDER.CONF [IMAGES-FOLDER]

It makes the database, starts scheduler, volume and backup service and the API, and prints the API's
port. All are the real ones, with the message bus of oslo.messaging that is inside the process.
Nova is a mock unless CINDER.CONF names one. With an IMAGES-FOLDER that is Glance: of an image
ID.json is what is known, and ID its data.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any, BinaryIO
from unittest import mock

from cinder import monkey_patch

monkey_patch.patch()

import os_brick
from cinder import objects, rpc, service, utils
from cinder import version as versions
from cinder.common import config, constants
from cinder.compute import nova
from cinder.db import migration
from cinder.image import glance
from oslo_log import log as logging
from oslo_privsep import priv_context

CONF = config.CONF


class Images:
    """Glance, as Cinder calls it."""

    def __init__(self, folder: Path) -> None:
        """Has the images of a folder."""
        self.folder = folder
        self.temp_images: Any = None

    def show(self, context: object, image_id: str) -> dict[str, Any]:
        """Returns what is known of an image."""
        found: dict[str, Any] = json.loads((self.folder / f"{image_id}.json").read_text())
        return found

    def get_location(self, context: object, image_id: str) -> tuple[None, None]:
        """Returns where else an image is: nowhere."""
        return None, None

    def download(self, context: object, image_id: str, data: BinaryIO) -> None:
        """Writes an image's data to a file."""
        with (self.folder / image_id).open("rb") as file:
            shutil.copyfileobj(file, data)

    def create(self, context: object, meta: dict[str, Any]) -> dict[str, Any]:
        """Notes an image that is to be uploaded."""
        image = {"id": f"image-{len(list(self.folder.glob('*.json')))}", "status": "queued"} | meta
        self._note(image)
        return image

    def update(
        self,
        context: object,
        image_id: str,
        meta: dict[str, Any],
        data: Any = None,
        **kwargs: object,
    ) -> dict[str, Any]:
        """Takes an image's data, or more about it."""
        image = self.show(context, image_id) | meta
        if data is not None:
            with (self.folder / image_id).open("wb") as file:
                while piece := data.read(1 << 20):
                    file.write(piece)
            image["status"] = "active"
        self._note(image)
        return image

    def _note(self, image: dict[str, Any]) -> None:
        (self.folder / f"{image['id']}.json").write_text(json.dumps(image))


def _nova() -> mock.Mock:
    """Returns Nova as Cinder calls it: a mock, but for growing volumes where a real one is named.

    Whether a server has an attachment, Cinder would ask with the token of who calls, by Keystone.
    """
    api = mock.Mock()
    if CONF.nova.auth_type:
        api.extend_volume = nova.API().extend_volume
    return api


def main() -> None:
    """Runs until it is killed."""
    objects.register_all()
    CONF([f"--config-file={sys.argv[1]}"], project="cinder", version=versions.version_string())
    logging.setup(CONF, "cinder")
    priv_context.init(root_helper=shlex.split(utils.get_root_helper()))
    os_brick.setup(CONF)
    migration.db_sync()
    rpc.init(CONF)
    with contextlib.ExitStack() as mocks:
        mocks.enter_context(mock.patch.object(nova, "API", return_value=_nova()))
        for folder in sys.argv[2:]:
            images = Images(Path(folder))
            mocks.enter_context(
                mock.patch.object(glance, "get_default_image_service", return_value=images)
            )
        for binary in (constants.SCHEDULER_BINARY, constants.BACKUP_BINARY):
            service.Service.create(binary=binary, coordination=True).start()
        # The last ones, as a process of Cinder's is one service: what it notes is the last one's.
        for backend in CONF.enabled_backends:
            volume = service.Service.create(
                host=f"{CONF.host}@{backend}",
                service_name=backend,
                binary=constants.VOLUME_BINARY,
                coordination=True,
            )
            volume.start()
        api = service.WSGIService("osapi_volume")
        api.start()
        print(api.port, flush=True)
        volume.wait()
        api.wait()


if __name__ == "__main__":
    main()
