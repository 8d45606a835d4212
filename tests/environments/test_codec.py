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


def test_a_tokenizer_that_raises_is_told_by_character_in_words_of_ours_with_its_few_tokens():
    with pytest.raises(UserError) as raised:
        HuggingFaceCodec(characters()).encode("Sort 52")
    assert str(raised.value) == (
        "[environment-unknown-character] the tokenizer has no token for 'S', 'o', 'r', 't', ' '; "
        "its 15 tokens are ^ a d = 0 1 2 3 4 5 6 7 8 9 $; in 'Sort 52'; "
        "choose another rendering of the task, or a model whose tokenizer knows its characters"
    )


def test_of_many_unknown_characters_the_first_five_are_named_and_the_rest_counted():
    with pytest.raises(UserError, match=r"no token for 'b', 'c', 'e', 'f', 'g' and 2 more; its"):
        HuggingFaceCodec(characters()).encode("abcdefghi")  # a and d are known


def test_the_tokens_of_a_large_vocabulary_are_not_told():
    vocabulary = {chr(0x4E00 + i): i for i in range(64)} | {"$": 64}
    with pytest.raises(UserError, match=r"no token for 'x'; in 'x'; "):
        HuggingFaceCodec(wrap(Tokenizer(models.WordLevel(vocabulary)))).encode("x")


def test_text_without_a_token_is_refused():
    with pytest.raises(UserError, match="environment-empty-text"):
        HuggingFaceCodec(characters()).encode("")
