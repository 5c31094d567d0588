"""Settings: defaults, aliases, the grammar of sites, and what is said of a value that can't be used."""

from __future__ import annotations

import dataclasses

import pytest

from lora_fastpath import settings
from lora_fastpath.settings import Settings, SettingsError

SITES = ("adapters", "qkv", "row")


def read(release: str = "0.5.12.post1", **environ: str) -> Settings:
    return Settings.from_environ(environ, SITES, lambda: release)


@pytest.mark.parametrize("environ", [{}, {name: "" for name in settings.NAMES}, {"LORA_FASTPATH": " "}])
def test_unset_and_empty_are_the_default(environ):
    assert read(**environ) == Settings(enabled=False, sites=frozenset(SITES), max_tokens=256, strict=False)


def test_everything_set():
    chosen = read(LORA_FASTPATH="1", LORA_FASTPATH_SITES="qkv", LORA_FASTPATH_MAX_TOKENS="16", LORA_FASTPATH_STRICT="1")
    assert chosen == Settings(True, frozenset({"qkv"}), 16, True, "qkv")
    with pytest.raises(dataclasses.FrozenInstanceError):
        chosen.enabled = False


class TestAliases:
    @pytest.mark.parametrize("release", ["0.5.12.post1", "0.5.9", "0.4.10", ""])
    def test_switch_before_sglang_owns_it(self, release):
        assert read(release, SGLANG_EXPERIMENTAL_LORA_OPTI="1").enabled

    @pytest.mark.parametrize("release", ["0.5.13", "0.5.13rc1", "0.6.0", "1.0", "0.5.13.dev7+gabc"])
    @pytest.mark.parametrize("value", ["1", "true"])
    def test_switch_that_sglang_owns_says_nothing(self, release, value):
        assert not read(release, SGLANG_EXPERIMENTAL_LORA_OPTI=value).enabled

    def test_malformed_switch_alias_is_named(self):
        with pytest.raises(SettingsError, match="SGLANG_EXPERIMENTAL_LORA_OPTI=yes: allowed are 1"):
            read(SGLANG_EXPERIMENTAL_LORA_OPTI="yes")

    def test_own_names_win(self):
        chosen = read(
            LORA_FASTPATH="0",
            SGLANG_EXPERIMENTAL_LORA_OPTI="1",
            LORA_FASTPATH_MAX_TOKENS="8",
            SGLANG_TWO_STREAM_MAX_TOKENS="nonsense",
        )
        assert not chosen.enabled and chosen.max_tokens == 8

    def test_max_tokens(self):
        assert read(SGLANG_TWO_STREAM_MAX_TOKENS="32").max_tokens == 32
        with pytest.raises(SettingsError, match="SGLANG_TWO_STREAM_MAX_TOKENS=x"):
            read(SGLANG_TWO_STREAM_MAX_TOKENS="x")


@pytest.mark.parametrize(
    ("text", "sites"),
    [
        ("all", {"adapters", "qkv", "row"}),
        ("all,-row", {"adapters", "qkv"}),
        (" all , -row,", {"adapters", "qkv"}),
        ("-row", {"adapters", "qkv"}),
        ("adapters,qkv", {"adapters", "qkv"}),
        ("-row,row", {"adapters", "qkv", "row"}),
        ("qkv,all,-qkv", {"adapters", "row"}),
    ],
)
def test_sites(text, sites):
    assert read(LORA_FASTPATH_SITES=text).sites == sites


@pytest.mark.parametrize("text", ["moe", "all,-moe", "-all", "QKV", "all;-row", "--row"])
def test_unknown_site_is_named_with_the_allowed_ones(text):
    with pytest.raises(SettingsError) as error:
        read(LORA_FASTPATH_SITES=text)
    assert f"LORA_FASTPATH_SITES={text}" in str(error.value) and "all, adapters, qkv, row" in str(error.value)


@pytest.mark.parametrize("text", [",", "qkv,-qkv"])
def test_no_site_at_all_is_an_error(text):
    with pytest.raises(SettingsError, match="selects no site"):
        read(LORA_FASTPATH_SITES=text)


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "1e3", "1_000", "0x10", "many", "65537", "9" * 5000, "٣"])
def test_max_tokens_out_of_range(text):
    with pytest.raises(SettingsError, match="LORA_FASTPATH_MAX_TOKENS=.*1 to 65536"):
        read(LORA_FASTPATH_MAX_TOKENS=text)


@pytest.mark.parametrize("name", ["LORA_FASTPATH", "LORA_FASTPATH_STRICT"])
@pytest.mark.parametrize("text", ["2", "on", "True"])
def test_malformed_flag(name, text):
    with pytest.raises(SettingsError, match=f"{name}={text}: allowed are 1 .on. and 0 .off."):
        read(**{name: text})


def test_unknown_name_is_named_with_the_allowed_ones():
    with pytest.raises(SettingsError, match="LORA_FASTPATH_SITE=qkv.*LORA_FASTPATH_SITES"):
        read(LORA_FASTPATH_SITE="qkv")


def test_current_needs_activation(monkeypatch):
    monkeypatch.setattr(settings, "_current", None)
    with pytest.raises(RuntimeError, match="LORA_FASTPATH=1"):
        settings.current()
    chosen = read()
    settings.use(chosen)
    assert settings.current() is chosen


def test_installed_sglang_is_found_without_importing_it(tmp_path, monkeypatch):
    folder = tmp_path / "sglang-7.8.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 7.8\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert settings.installed_sglang() == "7.8"
