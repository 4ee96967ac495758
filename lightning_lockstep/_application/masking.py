"""Secrets in a configuration, with `***` in their place: which keys hold them, as docs/hydra.md says."""

from __future__ import annotations

import os
import re
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lightning_lockstep._system import write_whole
from lightning_lockstep._text import say

_HIDDEN = "***"
_SECRET = re.compile(r"secret|passw(or)?d|passphrase|credential|(api|access|private)_?key")
_TOKEN = re.compile(r"token(?![a-z])")
# Words of language models are no secrets, nor are numbers, nor a token that is written as "<pad>" or "[PAD]".
_OF_LANGUAGE = re.compile(r"(^|_)(pad|eos|bos|unk|cls|sep|mask)_token$")
_SPECIAL_TOKEN = re.compile(r"<.*>|\[.*\]", re.DOTALL)
_SECRET_VARIABLE = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)$", re.IGNORECASE)
_REFERENCE = re.compile(r"\$\{[^,]*\}")  # an interpolation without a default value is no secret itself
_OVERRIDE = re.compile(r"([+~]*[\w./@-]+)=(.*)", re.DOTALL)
_SHORTEST_SECRET = 8  # characters; a shorter value could be part of any text


class Mask:
    """What is secret in one configuration."""

    def __init__(self, config: DictConfig, environ: Mapping[str, str] | None = None) -> None:
        environ = os.environ if environ is None else environ
        shown = config.get("unmask") or ()
        self._shown = frozenset([shown] if isinstance(shown, str) else map(str, shown))
        self._values: list[str] = []
        self._found = {value for name, value in environ.items() if _SECRET_VARIABLE.search(name)}
        self.masked(config)
        long = [value for value in self._found if len(value) >= _SHORTEST_SECRET]
        self._values = sorted(long, key=len, reverse=True)  # one may be a part of another

    def masked(self, value: Any, *, hide: bool = False) -> Any:
        """Return a value of containers, text and numbers without what is secret; hide: all that is in it."""
        if OmegaConf.is_config(value):
            value = OmegaConf.to_container(value, resolve=False, enum_to_str=True)
        if isinstance(value, Namespace):
            value = vars(value)
        if isinstance(value, dict):
            return {key: self.masked(item, hide=hide or self._is_secret(str(key), item)) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)([self.masked(item, hide=hide) for item in value])
        if hide and _may_be_secret(value):
            self._found.add(str(value))
            return _HIDDEN
        if not isinstance(value, str):
            return value
        if (line := _OVERRIDE.fullmatch(value)) and self._is_secret(re.split(r"[./]", line[1])[-1], line[2]):
            return f"{line[1]}={_HIDDEN}"
        for secret in self._values:
            value = value.replace(secret, _HIDDEN)
        return value

    def in_files(self, *paths: Path) -> None:
        """Mask what Hydra has written to YAML files; those that are not there are left out."""
        for path in paths:
            if not path.is_file():
                continue
            plain = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
            masked = self.masked(plain)
            if masked != plain and (error := write_whole(path, OmegaConf.to_yaml(OmegaConf.create(masked)))):
                text = f"secrets remain readable in {path}, which cannot be written: {error}"
                say(f"lightning-lockstep: {text}")

    def _is_secret(self, key: str, value: Any) -> bool:
        if key in self._shown:
            return False
        # "hfToken" is written as "hf_token", "HF_TOKEN" as it is.
        name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key).lower().replace("-", "_")
        if _SECRET.search(name):
            return True
        if not _TOKEN.search(name) or _OF_LANGUAGE.search(name):
            return False
        is_number = isinstance(value, (int, float)) or (isinstance(value, str) and value.isdecimal())
        return not is_number and not (isinstance(value, str) and _SPECIAL_TOKEN.fullmatch(value))


def _may_be_secret(value: Any) -> bool:
    if isinstance(value, str):
        return bool(value) and value != "???" and not _REFERENCE.fullmatch(value)
    return isinstance(value, (int, float)) and not isinstance(value, bool)
