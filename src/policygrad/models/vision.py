"""Pictures for models that see: a processor turns a prompt's pictures into `Media`, and a model reads them beside its token ids.

This is the only module that looks inside `Media`. Everything else passes it on.
"""

from __future__ import annotations

import copy
import inspect
import io
import itertools
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from hashlib import sha256
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from policygrad.core.media import Media, TextMedia, join_media, mark_slots
from policygrad.errors import ModelError
from policygrad.models.traits import base_network, placeholder_id
from policygrad.utils.pictures import Picture

CACHED_PICTURES = 64
"""Processed pictures that are kept, since the later turns of a conversation show its earlier pictures again."""
_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
_READ_AS_PADDING = ("gemma4", "gemma4_unified")
"""Models that read a placeholder token where there is no picture as the padding token."""
_TOKEN_TYPES = ("mm_token_type_ids", "token_type_ids")  # per token: 1 for a part of a picture
_ORIENTATION = 0x0112  # EXIF: how a camera was held
_NOT_MEDIA = frozenset({"input_ids", "attention_mask", *_TOKEN_TYPES})


# From pictures to media.


class PictureProcessor:
    """A model's processor: it says how many placeholder tokens stand for a picture, and what the model reads for it."""

    def __init__(self, processor: Any, placeholder: int, name: str, files: Sequence[Path] = ()) -> None:
        """
        Args:
            processor: That of transformers, with a tokenizer.
            placeholder: The id of the placeholder token.
            files: Those that it was loaded from, apart from the tokenizer's.
        """
        self.files = tuple(files)
        self.hf, self.placeholder, self.name = processor, placeholder, name
        names = [getattr(processor, name, None) for name in ("image_token", "boi_token")]
        names.append(processor.tokenizer.convert_ids_to_tokens(placeholder))
        self._marks = list(dict.fromkeys(str(name) for name in names if name))
        """What a chat template may write for a picture; the first that the processor accepts is right."""
        self._tokenizer = _TextRecorder(processor.tokenizer)
        self._copy = copy.copy(processor)
        self._copy.tokenizer = self._tokenizer
        self._lock = Lock()
        self._process = lru_cache(CACHED_PICTURES)(self._process_picture)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The special tokens that stand for a picture, or around one."""
        hf = self.hf.tokenizer
        special = {number: token.content for number, token in hf.added_tokens_decoder.items() if token.special}
        of_pictures = {self.placeholder} | {number for number, text in special.items() if text in self._marks}
        words = ("image", "vision", "img")
        return frozenset(
            of_pictures | {n for n, text in special.items() if any(word in text.lower() for word in words)}
        )

    def expand(self, text: str, pictures: Sequence[Picture], source: str) -> str:
        """Return a rendered text with as many placeholder tokens for each picture as the model reads for it.

        Raises:
            ModelError: The text has not one place for each picture, or the processor refuses one.
        """
        processed = [self._process(picture) for picture in pictures]
        pieces = text.split(self._marks[0])
        if len(pieces) != len(pictures) + 1:
            raise ModelError(
                f"{source}: {len(pictures)} picture{'s' * (len(pictures) != 1)}, but the text has the mark {self._marks[0]!r} of "
                f"{self.name!r} {len(pieces) - 1} times: text from data or tools must not spell it out, and the chat template must "
                "write it for each picture"
            )
        return pieces[0] + "".join(p.text + piece for p, piece in zip(processed, pieces[1:], strict=True))

    def media(self, ids: Tensor, pictures: Sequence[Picture], source: str) -> TextMedia:
        """Return the media of the pictures of a text, given its ids [P] with all placeholder tokens.

        Raises:
            ModelError: The text has other placeholder tokens than its pictures need.
        """
        slots = (ids == self.placeholder).nonzero().squeeze(1)
        processed = [self._process(picture) for picture in pictures]
        needed = [p.slots for p in processed]
        if sum(needed) != len(slots):
            raise ModelError(
                f"{source}: {len(slots)} placeholder tokens of {self.name!r} for pictures that need {sum(needed)}: text from data "
                "or tools must not spell them out"
            )
        parts = zip(torch.split(slots, needed), processed, pictures, strict=True)
        return tuple(Media(s, p.tensors, p.digest, picture.read()) for s, p, picture in parts)

    def picture_ids(self, picture: Picture) -> Tensor:
        """Return [n] int64: what stands for a picture in a text, its placeholder tokens and those around them.

        Raises:
            DataError: A picture that cannot be decoded.
            ModelError: The processor refuses it.
        """
        return self._encode(self._process(picture).text)

    def mark_ids(self, picture: Picture) -> Tensor:
        """Return [n] int64: what a chat template writes for a picture; engines expand it. Raises likewise."""
        self._process(picture)  # which finds the right mark
        return self._encode(self._marks[0])

    def _encode(self, text: str) -> Tensor:
        return torch.tensor(self.hf.tokenizer(text, add_special_tokens=False)["input_ids"], dtype=torch.int64)

    def save(self, folder: Path) -> None:
        """Write the files from which the processor is loaded again, apart from the tokenizer's."""
        if not self.files:
            self.hf.save_pretrained(folder)
        for file in self.files:
            shutil.copyfile(file, folder / file.name)

    def _process_picture(self, picture: Picture) -> _Processed:
        image, errors = picture.decode(), list[Exception]()
        for mark in list(self._marks):
            try:
                with self._lock:  # a later rollout may be sampled during an evaluation
                    out = self._copy(text=[mark], images=[[image]], return_tensors="pt")
                    text = self._tokenizer.text
            except Exception as error:  # a processor raises what it likes
                errors.append(error)
                continue
            self._marks = [mark]
            tensors = {name: x for name, x in out.items() if name not in _NOT_MEDIA and isinstance(x, Tensor)}
            # Idefics3's kind: texts are a dimension before pictures. LLaVA-NeXT's, with the pictures' sizes, has tiles after them.
            if tensors["pixel_values"].ndim == 5 and "image_sizes" not in tensors:
                tensors = {name: x[0] for name, x in tensors.items()}
            digest = sha256()
            for name, x in sorted(tensors.items()):
                digest.update(f"{name} {x.dtype} {list(x.shape)}".encode() + x.numpy().tobytes())
            slots = int((out["input_ids"] == self.placeholder).sum())
            return _Processed(text, slots, tensors, digest.hexdigest())
        raise ModelError(
            f"{picture.source}: the processor of {self.name!r} refuses the picture: {' '.join(str(errors[0]).split())}"
        ) from errors[0]


@dataclass(frozen=True, eq=False)
class _Processed:
    """What the processor made of one picture."""

    text: str  # what stands for it in a text
    slots: int  # its placeholder tokens
    tensors: dict[str, Tensor]
    digest: str


class _TextRecorder:
    """A tokenizer that remembers the text that it was given: a processor passes it the expanded one."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.text = tokenizer, ""

    def __call__(self, text: Any, *args: Any, **kwargs: Any) -> Any:
        self.text = text if isinstance(text, str) else text[0]
        return self._tokenizer(text, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def load_processor(path: str, model: nn.Module, tokenizer: Any, name: str, trust: bool) -> PictureProcessor | None:
    """Load the processor of a model that sees; None for one that does not, or whose folder has none.

    Without torchvision, which transformers needs for videos, it processes pictures alone.

    Raises:
        ModelError: The model sees, and its processor cannot be loaded.
    """
    if placeholder_id(model) is None:
        return None
    from transformers import AutoProcessor
    from transformers.utils.hub import cached_file

    cached = [cached_file(path, file, _raise_exceptions_for_missing_entries=False) for file in _PROCESSOR_FILES]
    files = [Path(file) for file in cached if file is not None]
    if not files:  # text alone can be trained
        return None
    load: Any = AutoProcessor.from_pretrained
    try:
        if find_spec("torchvision") is not None:
            processor = load(path, trust_remote_code=trust)
        else:
            processor = _load_without_videos(path, trust)
    except Exception as error:  # the class depends on what is wrong with which file
        raise ModelError(
            f"the processor of {name!r} cannot be loaded, without which no picture can be read: {' '.join(str(error).split())}"
        ) from error
    processor.tokenizer = tokenizer
    return wrap_processor(processor, model, name, files)


def wrap_processor(processor: Any, model: nn.Module, name: str, files: Sequence[Path] = ()) -> PictureProcessor | None:
    """Return a processor of transformers with what it lacks; None for a model that does not see."""
    placeholder = placeholder_id(model)
    return None if placeholder is None else PictureProcessor(processor, placeholder, name, files)


def _load_without_videos(path: str, trust: bool) -> Any:
    """Load a processor whose class also wants processors of videos and sound, without those."""
    from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer
    from transformers.models.auto.processing_auto import processor_class_from_name
    from transformers.processing_utils import ProcessorMixin

    options, _ = ProcessorMixin.get_processor_dict(path)
    named = options.get("processor_class") or _class_for_config(
        AutoConfig.from_pretrained(path, trust_remote_code=trust)
    )
    kind: Any = processor_class_from_name(named) if isinstance(named, str) else named
    accepted = inspect.signature(kind.__init__).parameters
    absent = [name for name in ("video_processor", "feature_extractor") if name in accepted]
    if "video_processor" not in absent:
        return kind.from_pretrained(path, trust_remote_code=trust)

    class ImagesOnly(kind):  # type: ignore[misc]
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            if argument_name in absent:
                return None
            return super().check_argument_for_proper_class(argument_name, argument)

        @classmethod
        def get_attributes(cls) -> list[str]:
            return [name for name in kind.get_attributes() if not (cls._is_saving and name in absent)]

        _is_saving = False

        def save_pretrained(self, *args: Any, **options: Any) -> Any:
            ImagesOnly._is_saving = True  # what is absent has nothing to write
            try:
                return super().save_pretrained(*args, **options)
            finally:
                ImagesOnly._is_saving = False

    ImagesOnly.__name__ = kind.__name__  # which `save_pretrained` writes down
    load = partial(_from_pretrained, path, trust)
    parts = {"image_processor": load(AutoImageProcessor), "tokenizer": load(AutoTokenizer), **dict.fromkeys(absent)}
    settings = {name: value for name, value in options.items() if name in accepted and name not in parts}
    return ImagesOnly(**parts, **{"chat_template": None, **settings})


def _from_pretrained(path: str, trust: bool, kind: Any) -> Any:
    return kind.from_pretrained(path, trust_remote_code=trust)


def _class_for_config(config: Any) -> Any:
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    return PROCESSOR_MAPPING[type(config)]


@lru_cache(CACHED_PICTURES)
def encode_picture_file(file: bytes) -> tuple[str, bytes]:
    """Return a picture's file for a reader that decodes it by itself: png or jpeg, and the file.

    It is the same file if its pixels are read alike everywhere, else a new one: readers differ in what they do with transparency,
    palettes, animations and the direction of a camera.
    """
    from PIL import Image

    with Image.open(io.BytesIO(file)) as image:
        upright = image.getexif().get(_ORIENTATION, 1) == 1
        if image.format in ("PNG", "JPEG") and image.mode == "RGB" and "transparency" not in image.info and upright:
            return image.format.lower(), file
    decoded, written = Picture(data=file).decode(), io.BytesIO()
    decoded.info.clear()  # pixels alone
    decoded.save(written, "PNG")
    return "png", written.getvalue()


# From media to a model's inputs.


def picture_inputs(model: nn.Module, ids: Tensor, is_slot: Tensor, media: Iterable[Media]) -> dict[str, Any]:
    """Return the model's inputs for texts with pictures, positions excepted.

    Args:
        ids: [R, L] token ids.
        is_slot: [R, L] bool, True at placeholder tokens that stand for a part of a picture. A policy may also sample the token:
            it is then read as any other token.
        media: All pictures, in the order of their placeholder tokens.
    """
    base = base_network(model)
    accepted = inspect.signature(base.forward).parameters
    tensors = join_media(tuple(media))
    if base.config.model_type in ("idefics2", "idefics3", "smolvlm"):  # a dimension for texts, which may be one
        tensors = {name: x[None] for name, x in tensors.items()}
    inputs: dict[str, Any] = {name: x.to(ids.device) for name, x in tensors.items() if name in accepted}
    inputs |= {name: is_slot.long() for name in _TOKEN_TYPES if name in accepted}
    placeholder = placeholder_id(model)
    written = (ids == placeholder) & ~is_slot
    if bool(written.any()):
        if base.config.model_type in _READ_AS_PADDING:
            return {"input_ids": ids.masked_fill(written, base.config.get_text_config().pad_token_id)} | inputs
        return {"input_ids": ids.masked_fill(written, _text_ids(base, 1)[0]), "embedded_ids": ids} | inputs
    return {"input_ids": ids} | inputs


def _text_ids(base: Any, count: int) -> list[int]:
    """Return the first ids of tokens that are part of no picture."""
    names = re.compile("(image|video|audio|vision|boi|eoi).*token")
    marks = {value for name, value in vars(base.config).items() if names.search(name)}
    return list(islice((number for number in itertools.count() if number not in marks), count))


@contextmanager
def embedding(model: nn.Module, ids: Tensor | None) -> Iterator[None]:
    """Let a model embed `ids` [R, L] although its `input_ids` have another token where the policy wrote a placeholder.

    None: do nothing.
    """
    if ids is None:
        yield
        return
    table = base_network(model).get_input_embeddings()
    hook = table.register_forward_pre_hook(lambda module, args: (ids,) if args[0].shape == ids.shape else None)
    try:
        yield
    finally:
        hook.remove()


def picture_positions(
    model: nn.Module, ids: Tensor, is_slot: Tensor, is_token: Tensor, media: Iterable[Media]
) -> Tensor:
    """Return the positions of texts with pictures, [R, L] or, where a part of a picture has several coordinates, [k, R, L].

    Args:
        ids, is_slot: As for `picture_inputs`.
        is_token: [R, L] bool, False at padding.
        media: All pictures, in the order of their placeholder tokens.
    """
    inner: Any = getattr(base_network(model), "model", None)
    if not hasattr(inner, "get_rope_index"):
        return (is_token.long().cumsum(1) - 1).clamp(min=0)
    accepted = inspect.signature(inner.get_rope_index).parameters
    placeholder = placeholder_id(model)
    ids = ids.masked_fill((ids == placeholder) & ~is_slot, _text_ids(base_network(model), 1)[0])
    options: dict[str, Any] = {
        name: x.to(ids.device) for name, x in join_media(tuple(media)).items() if name in accepted
    }
    options |= {name: is_slot.long() for name in _TOKEN_TYPES if name in accepted}
    positions: Tensor = inner.get_rope_index(ids, attention_mask=is_token.long(), **options)[0]
    return positions


def read_texts(model: nn.Module, ids: Tensor, media: Sequence[TextMedia]) -> Tensor:
    """Return logits [R, L, V] of texts with pictures, in one plain pass through a model that sees.

    Args:
        ids: [R, L] token ids; shorter texts are followed by any tokens.
        media: The pictures of each text; () = none has any.
    """
    rows = media or [()] * len(ids)
    slots = torch.stack([mark_slots(pictures, ids.shape[1]) for pictures in rows]).to(ids.device)
    is_token, pictures = torch.ones_like(ids, dtype=torch.bool), list(itertools.chain.from_iterable(rows))
    inputs = picture_inputs(model, ids, slots, pictures)
    positions = picture_positions(model, ids, slots, is_token, pictures)
    with embedding(model, inputs.pop("embedded_ids", None)):
        out = model(**inputs, attention_mask=is_token.long(), position_ids=positions, use_cache=False)
    return out.logits  # type: ignore[no-any-return]


def next_position(positions: Tensor) -> int:
    """Return the position of the token after a text, from the text's [P] or [k, P]."""
    return int(positions.max()) + 1


@torch.no_grad()
def attends_both_ways(model: nn.Module) -> bool:
    """Return whether a picture's parts attend to one another in both directions, as Gemma 3's do: masks then depend on pictures."""
    base = base_network(model)
    accepted = inspect.signature(base.forward).parameters
    names = [name for name in _TOKEN_TYPES if name in accepted]
    if not names:
        return False
    device = next(model.parameters()).device
    ids = torch.tensor([_text_ids(base, 8)], device=device)
    types = torch.zeros_like(ids)
    types[:, 2:6] = 1
    inputs: dict[str, Any] = {
        "attention_mask": torch.ones_like(ids),
        "position_ids": torch.arange(8, device=device)[None],
    }
    plain, marked = (
        base(input_ids=ids, **inputs, **dict.fromkeys(names, x), use_cache=False).logits for x in (types * 0, types)
    )
    return not torch.equal(plain, marked)
