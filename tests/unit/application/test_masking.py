"""Which keys hold secrets, and where these are masked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from lightning_lockstep._application.masking import Mask

SECRET = (
    *(
        "hf_token",
        "github_token",
        "wandb_token",
        "HF_TOKEN",
        "githubToken",
        "token",
        "hftoken",
        "token_value",
    ),
    *("secret", "client_secret", "secrets", "password", "db_password", "api_key", "apiKey", "WANDB_API_KEY"),
    *("aws_access_key_id", "private_key", "credentials", "openai-api-key"),
)


@pytest.mark.parametrize("key", SECRET)
def test_what_these_keys_hold_is_masked(key: str) -> None:
    config = OmegaConf.create({"a": {key: "abc"}, "b": {key: {"in": ["abc"]}}})
    assert Mask(config, {}).masked(config) == {"a": {key: "***"}, "b": {key: {"in": ["***"]}}}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_tokens", 512),
        ("num_tokens", "1e9"),
        ("tokenizer", "gpt2"),
        ("tokenizer_name", "gpt2"),
        ("tokenization", "bpe"),
        ("tokens_per_batch", "many"),
        ("token_id", 5),
        ("pad_token_id", 0),
        ("pad_token", "pad"),
        ("end_token", "</s>"),
        ("image_token", "[IMG]"),
        ("use_token", True),
        ("hf_token", None),
        ("key", "abc"),
        ("monitor", "val_loss"),
    ],
)
def test_what_these_keys_hold_is_not(key: str, value: Any) -> None:
    config = OmegaConf.create({key: value})
    assert Mask(config, {}).masked(config) == {key: value}


def test_numbers_are_passwords_but_no_tokens_and_a_key_can_be_shown() -> None:
    config = OmegaConf.create({"password": 12345, "token_level": "word", "unmask": ["token_level"]})
    assert Mask(config, {}).masked(config) == {**config, "password": "***"}


def test_a_secret_is_masked_wherever_it_occurs_and_those_of_the_environment_too() -> None:
    config = OmegaConf.create(
        {"hf_token": "hf_12345678", "url": "https://hf_12345678@host", "b": ["u:hunter2hunter2@h", "o"]}
    )
    mask = Mask(config, {"DATABASE_PASSWORD": "hunter2hunter2", "SHORT_TOKEN": "o"})
    assert mask.masked(config) == {"hf_token": "***", "url": "https://***@host", "b": ["u:***@h", "o"]}


def test_files_of_hydra_keep_references_and_lose_values(tmp_path: Path) -> None:
    given = {"hf_token": "${oc.env:HF_TOKEN}", "db": {"password": "abc"}, "seed": 1}
    overrides = ["db.password=abc", "+login={hf_token:hf_12345678}", "seed=1"]
    for name, content in (("config.yaml", given), ("overrides.yaml", overrides)):
        (tmp_path / name).write_text(yaml.safe_dump(content))
    frozen = OmegaConf.create({**given, "hf_token": "hf_12345678"})
    Mask(frozen, {}).in_files(tmp_path / "config.yaml", tmp_path / "overrides.yaml", tmp_path / "none.yaml")
    written = [yaml.safe_load((tmp_path / name).read_text()) for name in ("config.yaml", "overrides.yaml")]
    assert written[0] == {**given, "db": {"password": "***"}}
    assert written[1] == ["db.password=***", "+login={hf_token:***}", "seed=1"]
