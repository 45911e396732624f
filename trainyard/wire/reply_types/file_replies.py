"""The types of replies about files that are copied to, from and between hosts."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field

from trainyard.wire.reply_fields import FILES_LIMIT, Count, Digest, Line, OpenReply, Text

FileNames = Annotated[dict[Annotated[str, Field(max_length=4096)], tuple[Count, Digest]], Field(max_length=FILES_LIMIT)]


class LocalFile(OpenReply):
    kind: Literal["file", "folder", ""]
    names: FileNames
    texts: Annotated[dict[str, Text], Field(max_length=100)]
    error: Line


class LocalFiles(OpenReply):
    files: Annotated[dict[str, LocalFile], Field(max_length=100)]


class HubFetch(OpenReply):
    names: FileNames
    texts: Annotated[dict[str, Text], Field(max_length=100)]
    unreachable: Line


class Receive(OpenReply):
    lacking: Annotated[list[str], Field(max_length=FILES_LIMIT)]
    changed: NotRequired[Annotated[list[Line], Field(max_length=FILES_LIMIT)]]


class Relay(OpenReply):
    installed: Annotated[list[str], Field(max_length=FILES_LIMIT)]
    receive_error: Line
    send_error: Line


class Commit(OpenReply):
    changed: NotRequired[Annotated[list[Line], Field(max_length=FILES_LIMIT)]]
    claimed: NotRequired[Line]


class ReadFiles(OpenReply):
    text: dict[str, Annotated[str, Field(max_length=4 << 20)] | None]
    sizes: Annotated[dict[str, Count], Field(max_length=FILES_LIMIT)]
    sha256: Annotated[dict[str, Digest], Field(max_length=FILES_LIMIT)]


class ExchangeReply(OpenReply):
    """That the files are in place: the host reports no more."""


FILE_REPLY_TYPES: dict[str, Any] = {
    "local_files": LocalFiles,
    "hub_fetch": HubFetch,
    "receive": Receive,
    "relay": Relay,
    "commit": Commit,
    "read_files": ReadFiles,
    "exchange": ExchangeReply,
}
