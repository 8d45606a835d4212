"""Where the traceback of an error goes whose user is told one line."""

from __future__ import annotations

import tempfile
import traceback
from pathlib import Path


def keep_traceback(text: str, folder: Path | None) -> Path:
    """Write `text` to `folder`, or to a new temporary file where there is none; the file."""
    if folder is not None and folder.is_dir():
        file = folder / "traceback.txt"
        file.write_text(text, encoding="utf-8")
        return file
    with tempfile.NamedTemporaryFile(
        "w", prefix="onroute-traceback-", suffix=".txt", delete=False, encoding="utf-8"
    ) as stream:
        stream.write(text)
    return Path(stream.name)


def traceback_of(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))
