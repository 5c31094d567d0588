"""The switches, read from the environment once, at activation, into one frozen object."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping

PREFIX = "LORA_FASTPATH"
SWITCH_ALIAS = "SGLANG_EXPERIMENTAL_LORA_OPTI"
MAX_TOKENS_ALIAS = "SGLANG_TWO_STREAM_MAX_TOKENS"
NAMES = ("LORA_FASTPATH", "LORA_FASTPATH_SITES", "LORA_FASTPATH_MAX_TOKENS", "LORA_FASTPATH_STRICT")

ALIAS_IS_SGLANGS_SINCE = (0, 5, 13)
"""The sglang release from which SWITCH_ALIAS turns on sglang's own path, and so says nothing to us."""

DEFAULT_MAX_TOKENS = 256
LARGEST_MAX_TOKENS = 65536


class SettingsError(ValueError):
    """A setting that can't be used. The text names the setting, its value and what is allowed."""


@dataclasses.dataclass(frozen=True)
class Settings:
    enabled: bool
    sites: frozenset[str]
    max_tokens: int
    """Largest decode batch, in rows, that gets two streams."""
    strict: bool
    selection: str = "all"
    """LORA_FASTPATH_SITES as it was written, for messages."""

    @classmethod
    def from_environ(
        cls, environ: Mapping[str, str], site_names: Iterable[str], release: Callable[[], str] | None = None
    ) -> Settings:
        """Read `environ`; unset and empty mean the default. SettingsError names the first setting that can't be used.

        site_names: what LORA_FASTPATH_SITES may name. release: gives sglang's installed version, "" for none.
        """
        site_names = list(site_names)
        for name in sorted(environ):
            if name.startswith(f"{PREFIX}_") and name not in NAMES:
                raise SettingsError(f"unknown setting {name}={environ[name]}: allowed are {', '.join(NAMES)}")

        def given(name: str) -> str:
            return environ.get(name, "").strip()

        switch = PREFIX
        if not given(PREFIX) and given(SWITCH_ALIAS) and not _sglang_owns_the_alias(release or installed_sglang):
            switch = SWITCH_ALIAS
        tokens = MAX_TOKENS_ALIAS if given(MAX_TOKENS_ALIAS) and not given(NAMES[2]) else NAMES[2]
        selection = given("LORA_FASTPATH_SITES") or "all"
        return cls(
            enabled=_flag(switch, given(switch)),
            sites=_selected(selection, site_names),
            max_tokens=_tokens(tokens, given(tokens)),
            strict=_flag("LORA_FASTPATH_STRICT", given("LORA_FASTPATH_STRICT")),
            selection=selection,
        )


def _flag(name: str, text: str) -> bool:
    if text not in ("", "0", "1"):
        raise SettingsError(f"{name}={text}: allowed are 1 (on) and 0 (off)")
    return text == "1"


def _tokens(name: str, text: str) -> int:
    # isdecimal alone would take other scripts' digits, and int() would take "1_000"
    if not text:
        return DEFAULT_MAX_TOKENS
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and 1 <= int(text) <= LARGEST_MAX_TOKENS):
        raise SettingsError(f"{name}={text}: allowed are whole numbers from 1 to {LARGEST_MAX_TOKENS}")
    return int(text)


def _selected(text: str, site_names: list[str]) -> frozenset[str]:
    """`all,-row` or `qkv,row`: each item adds or takes away, from left to right. `-row` alone starts from all."""
    items = [item for item in (part.strip() for part in text.split(",")) if item]
    chosen = set(site_names) if items and items[0].startswith("-") else set()
    for item in items:
        name = item.removeprefix("-")
        if item == "all":
            chosen.update(site_names)
        elif name not in site_names:
            allowed = f"all, {', '.join(site_names)}, and each site with - before"
            raise SettingsError(f"LORA_FASTPATH_SITES={text}: unknown site {name!r}; allowed are {allowed}")
        elif item.startswith("-"):
            chosen.discard(name)
        else:
            chosen.add(name)
    if not chosen:
        raise SettingsError(f"LORA_FASTPATH_SITES={text}: selects no site; allowed are all, {', '.join(site_names)}")
    return frozenset(chosen)


def _sglang_owns_the_alias(release: Callable[[], str]) -> bool:
    # Digits alone decide: a pre-release of the first release that owns the name owns it too.
    return tuple(int(number) for number in re.findall(r"\d+", release())[:3]) >= ALIAS_IS_SGLANGS_SINCE


def installed_sglang() -> str:
    """sglang's version by its metadata, without importing it; "" when there is none."""
    import importlib.metadata

    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return ""


_current: Settings | None = None


def use(settings: Settings) -> None:
    """Make `settings` the process's; activation calls it once."""
    global _current
    _current = settings


def current() -> Settings:
    """The process's settings. RuntimeError before activation."""
    if _current is None:
        raise RuntimeError("lora-fastpath is not active in this process: set LORA_FASTPATH=1 before it starts")
    return _current
