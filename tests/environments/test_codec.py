from __future__ import annotations

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from onroute.core.errors import UserError
from onroute.environments.codec import HuggingFaceCodec

ALPHABET = "^ad=0123456789$"


def wrap(backend: Tokenizer, **special: str) -> PreTrainedTokenizerFast:
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="$", pad_token="$", **special)


def characters() -> PreTrainedTokenizerFast:
    """Raises on a character outside the alphabet."""
    return wrap(Tokenizer(models.WordLevel({c: i for i, c in enumerate(ALPHABET)})))


def characters_with_unknown_token() -> PreTrainedTokenizerFast:
    vocabulary = {c: i for i, c in enumerate(ALPHABET + "?")}
    return wrap(Tokenizer(models.WordLevel(vocabulary, unk_token="?")), unk_token="?")


def characters_that_drop_the_rest() -> PreTrainedTokenizerFast:
    """Leaves a character outside the alphabet out in silence."""
    return wrap(Tokenizer(models.BPE({c: i for i, c in enumerate(ALPHABET)}, merges=[])))


def test_text_becomes_int32_ids_without_added_tokens():
    ids = HuggingFaceCodec(characters()).encode("^a52=")
    assert ids.dtype == np.int32
    assert ids.tolist() == [0, 1, 9, 6, 3]  # positions in ALPHABET


def test_special_tokens_survive_decoding():
    codec = HuggingFaceCodec(characters())
    assert codec.decode([4 + 1, 14, 4 + 2]) == "1$2"


@pytest.mark.parametrize("build", [characters_with_unknown_token, characters_that_drop_the_rest])
def test_an_unknown_character_is_refused_by_name_with_or_without_an_unknown_token(build):
    with pytest.raises(UserError, match=r"environment-unknown-character.*'x'.*\^a5x2="):
        HuggingFaceCodec(build()).encode("^a5x2=")


def test_a_tokenizer_that_raises_on_a_character_is_a_mistake_of_the_user():
    with pytest.raises(UserError, match=r"environment-unknown-character.*\^a5x2="):
        HuggingFaceCodec(characters()).encode("^a5x2=")


def test_text_without_a_token_is_refused():
    with pytest.raises(UserError, match="environment-empty-text"):
        HuggingFaceCodec(characters()).encode("")
