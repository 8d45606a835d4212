"""Text to token ids and back, by a transformers tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from onroute.core.errors import UserError
from onroute.core.samples import Tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MOST_NAMED = 5
_SMALL_VOCABULARY = 64
_OTHER_TEXT = "choose another rendering of the task, or a model whose tokenizer knows its characters"


class HuggingFaceCodec:
    """`TextCodec` of one tokenizer.

    No special token is added on the way in, and none is dropped on the way out: a policy that
    samples a padding token inside its answer must not be scored as if it had not.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> Tokens:
        """Ids of `text`, int32 [num_tokens].

        Raises `UserError` when the text has no token or a character the tokenizer does not know.
        """
        try:
            encoding = self._tokenizer(
                text, add_special_tokens=False, return_offsets_mapping=self._tokenizer.is_fast
            )
        except Exception as error:  # the tokenizers library raises nothing more precise
            unknown = [character for character in dict.fromkeys(text) if not self._knows(character)]
            if unknown:
                raise self._unknown(text, unknown) from error
            reason = f"the tokenizer refuses a text: {error}"
            raise UserError(
                "environment-refused-text", reason, f"in {_excerpt(text)}", _OTHER_TEXT
            ) from error
        ids: list[int] = encoding["input_ids"]
        if not ids:
            raise UserError(
                "environment-empty-text",
                "text encodes to no token",
                f"in {_excerpt(text)}",
                "give a prompt with at least one character that the tokenizer knows",
            )
        spans: list[tuple[int, int]] = encoding["offset_mapping"] if self._tokenizer.is_fast else []
        unknown = self._unknown_parts(text, ids, spans)
        if unknown:
            raise self._unknown(text, unknown)
        return np.asarray(ids, dtype=np.int32)

    def decode(self, tokens: Sequence[int] | Tokens) -> str:
        ids = [int(token) for token in tokens]
        text = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(text)

    def _unknown(self, text: str, parts: Sequence[str]) -> UserError:
        """The error that tells the first unknown parts of a text, and what is known where that is little."""
        named = ", ".join(map(repr, parts[:_MOST_NAMED]))
        more = f" and {len(parts) - _MOST_NAMED} more" if len(parts) > _MOST_NAMED else ""
        vocabulary: dict[str, int] = self._tokenizer.get_vocab()
        known = ""
        if len(vocabulary) <= _SMALL_VOCABULARY:
            tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
            known = f"; its {len(tokens)} tokens are {' '.join(repr(token)[1:-1] for token in tokens)}"
        return UserError(
            "environment-unknown-character",
            f"the tokenizer has no token for {named}{more}{known}",
            f"in {_excerpt(text)}",
            _OTHER_TEXT,
        )

    def _knows(self, character: str) -> bool:
        try:
            ids: list[int] = self._tokenizer(character, add_special_tokens=False)["input_ids"]
        except Exception:  # as in `encode`
            return False
        return bool(ids) and self._tokenizer.unk_token_id not in ids

    def _unknown_parts(self, text: str, ids: list[int], spans: list[tuple[int, int]]) -> list[str]:
        """Parts of `text` that became the unknown token, or no token at all: a vocabulary without
        an unknown token leaves them out in silence."""
        unknown_id = self._tokenizer.unk_token_id
        if not spans:
            has_unknown = unknown_id is not None and unknown_id in ids
            named = [character for character in dict.fromkeys(text) if not self._knows(character)]
            return (named or [_excerpt(text)]) if has_unknown else []
        parts = [text[a:b] for token, (a, b) in zip(ids, spans, strict=True) if token == unknown_id]
        covered = {position for a, b in spans for position in range(a, b)}
        parts += [c for i, c in enumerate(text) if i not in covered and not c.isspace()]
        return list(dict.fromkeys(parts))


def _excerpt(text: str, limit: int = 60) -> str:
    return repr(text if len(text) <= limit else text[:limit] + "…")
