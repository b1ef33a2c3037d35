"""Records of what took long to find, kept on disk, so that the next process need not find it again."""

from __future__ import annotations

import json
import logging
from typing import Any, NamedTuple

from cute_ops.errors import CacheError
from cute_ops.files import cache_dir, json_schema

log = logging.getLogger("cute_ops")


class Records(NamedTuple):
    """A folder of records in the cache folder, each in a file of its own.

    Attributes:
        folder: its name.
        noun: what a record is, for the log.
        shape: of a record, as :mod:`cute_ops.files.json_schema` has it.
    """

    folder: str
    noun: str
    shape: dict[str, Any]

    def recall(self, key: str) -> dict[str, Any] | None:
        """The record of a key; None if there is none, or it cannot be read."""
        try:
            found = json_schema.parse(cache_dir.read(cache_dir.folder() / self.folder, f"{key}.json"), self.shape)
        except FileNotFoundError:
            return None
        except (OSError, CacheError, ValueError) as error:
            log.debug("%s %s cannot be read: %s", self.noun, key, error)
            return None
        return dict(found)

    def keep(self, key: str, record: dict[str, Any]) -> None:
        """Write a record, if the cache folder can be written."""
        where = cache_dir.folder() / self.folder
        try:
            cache_dir.make(where)
            cache_dir.check_trusted(where)
            cache_dir.write_whole(where, {f"{key}.json": json.dumps(record).encode()})
        except (OSError, CacheError) as error:
            log.debug("%s %s cannot be kept: %s", self.noun, key, error)
