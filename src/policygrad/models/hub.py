"""Where a model is: a folder, or a hub id. What is neither is refused at once, and without a network only the cache is asked."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

from policygrad.errors import ModelError
from policygrad.models.lora import FILE

TIMEOUT = 5.0  # seconds for the hub's first answer; transformers alone would try for half a minute
LONGEST = 255  # bytes of a name
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


def check_name(model: str) -> None:
    """Raises ModelError for what no system takes for a folder's name."""
    if any(len(part.encode(errors="replace")) > LONGEST for part in Path(model).parts):
        raise ModelError(
            f"there is no model {model[:40]!r}…: a name has at most {LONGEST} bytes, this has {len(model)} characters"
        )


def locate(model: str) -> str:
    """A folder as it is; a hub id, or the folder of the cache that holds it when the hub cannot be reached.

    Raises:
        ModelError: neither a folder nor a hub id; a hub id that nobody has.
    """
    path = Path(model)
    if path.is_dir():
        return model
    if path.exists():
        raise ModelError(f"the model {model!r} is a file: give the folder that holds config.json and safetensors")
    if not _HUB_ID.fullmatch(model):
        raise ModelError(
            f"there is no model folder {model!r}: a relative path starts at {Path.cwd().name!r}, the current folder"
        )
    return _on_hub(model)[0]


def files(model: str) -> frozenset[str]:
    """Names of what a hub's repository holds, as the hub says, or of what the cache has of it; empty of a folder.

    Raises:
        ModelError: neither a folder nor a hub id that somebody has.
    """
    return frozenset() if Path(model).exists() or not _HUB_ID.fullmatch(model) else _on_hub(model)[1]


@lru_cache(maxsize=8)
def _on_hub(model: str) -> tuple[str, frozenset[str]]:
    """(what to load it by, the names of its files)."""
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    try:
        found = HfApi().model_info(model, timeout=TIMEOUT)
    except RepositoryNotFoundError:
        raise ModelError(
            f"{model!r} is neither a folder here nor a model on the hub. A private one needs `hf auth login`; 'tiny' is the "
            "model inside the package"
        ) from None
    except HFValidationError as error:
        raise ModelError(f"{model!r} is neither a folder here nor a hub id: {str(error).partition('. ')[0]}") from None
    except HfHubHTTPError:
        return model, frozenset()  # the hub is there: let it say to transformers what is the matter
    except Exception as error:  # no network; of which class depends on the hub client's version
        known = [try_to_load_from_cache(model, name) for name in ("config.json", FILE)]
        cached = next((Path(path).parent for path in known if isinstance(path, str)), None)
        if cached is None:
            raise ModelError(
                f"there is no folder {model!r}, the hub cannot be reached ({type(error).__name__}), and its cache does not have "
                "the model. Give a folder with config.json and safetensors, or 'tiny', the model inside the package"
            ) from None
        return str(cached), frozenset(file.name for file in cached.iterdir())
    return model, frozenset(file.rfilename for file in found.siblings or ())


def push(folder: Path, repo: str, public: bool = False) -> str:
    """The folder's files as one commit on the hub; where it then is. public: for everybody, where the repository is new.

    repo: OWNER/NAME. The hub is that of HF_ENDPOINT, the token that of HF_TOKEN or `hf auth login`.

    Raises:
        ModelError: no such name, no token, or what the hub or the way to it refuses.
    """
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    check_repo(repo)
    if get_token() is None:
        raise ModelError(
            f"to push to {repo} the hub asks who you are: `hf auth login`, or set HF_TOKEN to a token that may write"
        )
    try:
        hub = HfApi()
        hub.create_repo(repo, private=not public, exist_ok=True)
        hub.upload_folder(repo_id=repo, folder_path=folder, commit_message="Trained with policygrad")
        return f"{hub.endpoint}/{repo}"
    except (HfHubHTTPError, HFValidationError) as error:
        said = " ".join(str(error).split())
        raise ModelError(
            f"the hub refuses {repo}: {said}; look at the name, and whether the token may write there"
        ) from error
    except OSError as error:
        raise ModelError(f"{folder} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # no network; of which class depends on the hub client's version
        why = f"{type(error).__name__}: {error}"
        raise ModelError(f"the hub cannot be reached ({why}); the model stays in {folder}, push again later") from error


def check_repo(repo: str) -> None:
    """Raises ModelError for what is no OWNER/NAME."""
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", repo):
        raise ModelError(f"{repo!r} is no repository of the hub: OWNER/NAME, such as me/my-model")
