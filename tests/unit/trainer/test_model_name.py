"""Names of models that are refused before anything is asked."""

from pathlib import Path

import pytest
from tables import table

from trainer.common.errors import UserError
from trainer.model_files.model_name import check_model_name
from trainer.model_files.model_shape import shape_of
from trainer.models.model import load_tokenizer
from trainer.spec import make_spec


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty cache, and a network where every name of the hub would be looked up."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: pytest.fail("the hub is asked"))


@pytest.mark.parametrize(("name", "said"), table("model_name")["a_name_without_an_owner_is_refused_at_once"])
def test_a_name_without_an_owner_is_refused_at_once(name: str, said: str) -> None:
    spec = make_spec({"model": name, "run": "r", "fake_data": True}, "the test")
    for look in (check_model_name, load_tokenizer, lambda _: shape_of(spec)):
        with pytest.raises(UserError) as caught:
            look(name)
        assert str(caught.value).startswith(said), look


def test_a_folder_a_hub_id_and_a_model_of_the_cache_are_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hub/models--gpt2/snapshots/1").mkdir(parents=True)
    (tmp_path / "hub/models--gpt2/snapshots/1/config.json").touch()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    for name in ("mine", "./mine", "org/name", "gpt2"):
        check_model_name(name)
    with pytest.raises(UserError, match=r"^teacher: no such model: other: set 'smollm2', a local"):
        check_model_name("other", "teacher")
