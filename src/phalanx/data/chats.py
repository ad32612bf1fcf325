"""Encode chats into two marked token files, training and validation, and keep them in the cache.

Each conversation is rendered and encoded once, as a whole, because pieces that are encoded apart
may have other tokens. A token is trained if a character of an answer is in it. A row of `seq_len`
tokens holds whole conversations, which do not see each other:

    | conversation 1 | conversation 5 | padding |      best fit of the rows that are still open
    | conversation 2     | conversation 3 | pad |

Of preferences, the chosen and the rejected conversation of a pair lie side by side in one row. A
pair of more than `seq_len` tokens is cut: each of the two ends after `seq_len` / 2.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import AddedToken, Tokenizer, processors

from phalanx.config import CorpusConfig
from phalanx.data.cache import cache_folder, find_or_make, fingerprint
from phalanx.data.chat_rows import PREFERENCE, Conversation, conversation_of
from phalanx.data.chat_template import ChatTemplate
from phalanx.data.corpus import Document
from phalanx.data.survey import Corpus, Progress, no_progress
from phalanx.data.token_file import OPENS, TRAINED, TokenWriter
from phalanx.data.tokenizer import check_vocabulary, load_tokenizer
from phalanx.data.tokens import TOKENIZER, TRAIN, VALIDATION, TokenFiles, hold_out, open_tokens
from phalanx.errors import ConfigError, DataError

_OPEN_ROWS: Final = 64
"""Most rows that wait for a conversation that fits."""

TODAY: Final = datetime(2025, 1, 1)
"""What a template that prints the date prints: with the present one, no later run has its data."""


@dataclass(frozen=True)
class ChatFormat:
    """How conversations become tokens.

    Attributes:
        template: Jinja source of the chat template.
        names: variables of the template, such as `bos_token`.
        added: tokens of the model that its tokenizer.json lacks.
        end_ids: ids of the tokens that end a text of the model.
    """

    template: str
    names: Mapping[str, str]
    added: Sequence[AddedToken] = ()
    end_ids: Sequence[int] = ()

    def compiled(self) -> ChatTemplate:
        """Return the template for training."""
        return ChatTemplate(self.template, self.names, TODAY)


def encode_opening(
    chat: Mapping[str, Any], tokenizer: Tokenizer, question: str | None
) -> tuple[str, list[int]]:
    """Return a question, or the last one of the opening of `chat`, and the tokens that ask it."""
    messages, tools = chat["opening"]["messages"], chat["opening"]["tools"]
    if question is not None or not messages:
        messages, tools = [{"role": "user", "content": question or "Hello"}], None
    template = ChatTemplate(chat["template"], chat["names"], TODAY)
    text = template.render(messages, tools=tools, add_generation_prompt=True)
    tokenizer.encode_special_tokens = False
    return messages[-1].get("content", ""), tokenizer.encode(text, add_special_tokens=False).ids


def prepare_chats(
    data: str,
    corpus: CorpusConfig,
    layout: str,
    form: ChatFormat,
    *,
    model_vocab_size: int,
    tokenizer: str,
    is_follower: bool = False,
    progress: Progress | None = None,
) -> TokenFiles:
    """Encode the chats in the rows of a corpus, or find their tokens in the cache.

    Args:
        data: a file, folder or glob with records.
        corpus: settings of the corpus.
        layout: layout of all rows, see `chat_rows`.
        form: template and special tokens.
        model_vocab_size: rows of the model's embedding.
        tokenizer: a tokenizer.json.
        is_follower: see `tokens.prepare`.
        progress: callback with the progress of the work.

    Raises:
        DataError: a row is not valid or of another layout, or its answers cannot be found; or see
            `tokens.prepare`.
        ConfigError: the tokenizer does not fit the model, or the template is not valid.
    """
    used = load_tokenizer(tokenizer)
    used.add_tokens(list(form.added))
    check_vocabulary(used, model_vocab_size, f"tokenizer {tokenizer}")
    form.compiled()  # raises if the source is not valid
    source = Corpus(data, corpus.max_bytes, progress or no_progress, has_rows=True)
    cache = cache_folder(corpus.cache)
    text = source.text(cache, is_follower=is_follower)
    how = (layout, form.template, sorted(form.names.items()), corpus.turns)
    # Another version of the library may split a text into other tokens.
    sizes = (corpus.validation, corpus.seq_len, tokenizers.__version__)
    folder = cache / "tokens" / fingerprint("chats", text.digest, used.to_str(), *how, *sizes)

    def write(partial: Path) -> dict[str, object]:
        (partial / TOKENIZER).write_text(used.to_str(), "utf-8")
        chat = _encode(partial, source, text.num_bytes, used, form, layout, corpus)
        return {
            "num_documents": text.num_documents,
            "num_bytes": text.num_bytes,
            "text_digest": text.digest,
            "tokenizer_digest": fingerprint("tokenizer", used.to_str()),
            "chat": chat,
        }

    find_or_make(folder, write, needed_bytes=2 * text.num_bytes, is_hashed=not is_follower)
    files = replace(open_tokens(folder), left_out=source.left_out())
    if files.train.num_tokens <= 1:
        raise DataError(
            f"nothing is left to train on: of {text.num_documents} conversations of {data}, none "
            f"outside of corpus.validation {corpus.validation} has an answer within its first "
            f"corpus.seq_len {corpus.seq_len} tokens"
        )
    assert files.chat is not None, "written above"
    end_ids = dict.fromkeys([*form.end_ids, *files.chat["end_ids"]])
    return replace(files, chat=files.chat | {"end_ids": list(end_ids)})


def _encode(
    folder: Path,
    source: Corpus,
    num_bytes: int,
    tokenizer: Tokenizer,
    form: ChatFormat,
    layout: str,
    corpus: CorpusConfig,
) -> dict[str, Any]:
    """Encode the conversations into the two files of `folder`; return `TokenFiles.chat`."""
    encoder = _Encoder(tokenizer, form, layout, corpus.turns)
    validation = hold_out(*source.names_and_sizes(), corpus.validation, is_whole=True).validation
    counts, ends, longest, done_bytes = Counter[str](), Counter[int](), 0, 0
    opening: dict[bool, dict[str, Any]] = {}
    with ExitStack() as stack:
        packers = [
            stack.enter_context(_Packer(folder / name, corpus.seq_len))
            for name in (TRAIN, VALIDATION)
        ]
        for number, document in enumerate(source.documents()):
            chat, marked, last_ids = encoder.encode(document)
            is_validation = number in validation
            longest = max(longest, len(marked))
            pieces = np.split(marked, np.flatnonzero(marked & OPENS)[1:])  # 1, or the 2 of a pair
            if len(marked) > corpus.seq_len:
                counts["cut"] += 1
                pieces = [each[: corpus.seq_len // len(pieces)] for each in pieces]
                marked = np.concatenate(pieces)
            in_pieces = [int(np.count_nonzero(each & TRAINED)) for each in pieces]
            num_trained = sum(in_pieces) if all(in_pieces) else 0
            if num_trained:
                packers[is_validation].add(marked)
                if chat.turns[0] and not opening.get(is_validation):
                    before: dict[str, Any] = {
                        "messages": chat.messages[: chat.turns[0]],
                        "tools": chat.tools,
                    }
                    form.compiled().render(**before, add_generation_prompt=True)  # or raises now
                    opening[is_validation] = before
            counts["left_out"] += not num_trained
            counts["trained"] += num_trained
            counts["tokens"] += len(marked)
            ends.update(last_ids)
            done_bytes += len(document.text.encode())
            source.report("encode", done_bytes, num_bytes)
    source.check_bytes(done_bytes)
    num_endless = ends.pop(-1, 0)
    return {
        "layout": layout,
        "template": form.template,
        "names": dict(form.names),
        "end_ids": sorted(ends),  # of the tokens that end an answer
        **{f"num_{what}": counts[what] for what in ("trained", "tokens", "cut", "left_out")},
        "num_endless": num_endless,  # answers that no special token ends
        "longest": longest,  # tokens of a conversation before a cut
        "opening": opening.get(True) or opening.get(False) or {"messages": [], "tools": None},
    }


class _Encoder:
    """Renders and encodes conversations."""

    def __init__(self, tokenizer: Tokenizer, form: ChatFormat, layout: str, turns: str) -> None:
        self._template, self._layout, self._turns = form.compiled(), layout, turns
        # Special tokens that the template spells become tokens, and offsets keep whitespace.
        self._tokenizer = Tokenizer.from_str(tokenizer.to_str())
        self._tokenizer.encode_special_tokens = False
        self._tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = {id for id, token in added.items() if token.special}

    def encode(
        self, document: Document, is_rejected: bool = False
    ) -> tuple[Conversation, npt.NDArray[np.uint32], list[int]]:
        """Return conversation, marked ids, and the ids that end its answers.

        The id is -1 of an answer that no special token ends.
        """
        row = json.loads(document.text)
        which = (self._layout, document.name, self._turns)
        chat = conversation_of(row, *which, is_rejected=is_rejected)
        try:
            text, spans = self._template.render_answers(chat.messages, chat.tools, chat.turns)
        except ConfigError as error:
            raise DataError(f"{document.name}: {error}") from error
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        ids = np.array(encoding.ids, dtype=np.uint32)
        marked, last_ids = ids.copy(), list[int]()
        starts, ends = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2).T
        for start, end in spans:
            inside = np.flatnonzero((starts < end) & (ends > start))
            if not len(inside):
                continue
            marked[inside[0] : inside[-1] + 1] |= TRAINED
            spaces = end - start - len(text[start:end].rstrip())
            ending = int(ids[np.flatnonzero((starts < end - spaces) & (ends > start))[-1]])
            last_ids.append(ending if ending in self._special else -1)
        marked[:1] = ids[:1] | OPENS  # nothing precedes the first token, from which it is predicted
        if self._layout == PREFERENCE and not is_rejected:
            _, other, more = self.encode(document, is_rejected=True)
            marked, last_ids = np.concatenate([marked, other]), last_ids + more
        return chat, marked, last_ids


class _Packer:
    """Writer of a marked token file, which packs conversations into rows."""

    def __init__(self, path: Path, seq_len: int) -> None:
        self._writer = TokenWriter(path, num_ids=0, end_id=0, is_marked=True)
        self._seq_len = seq_len
        self._rows: list[list[npt.NDArray[np.uint32]]] = []
        self._room: list[int] = []

    def __enter__(self) -> _Packer:
        self._writer.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            while self._rows:
                self._flush(0)
            # The label of the last token of a row is the first token of the next one.
            self._writer.write([OPENS])
        self._writer.__exit__(kind, *rest)

    def add(self, marked: npt.NDArray[np.uint32]) -> None:
        """Add a conversation of at most `seq_len` tokens."""
        fits = [(room, row) for row, room in enumerate(self._room) if room >= len(marked)]
        if fits:
            row = min(fits)[1]
        else:
            if len(self._rows) == _OPEN_ROWS:
                self._flush(self._room.index(min(self._room)))
            row = len(self._rows)
            self._rows.append([])
            self._room.append(self._seq_len)
        self._rows[row].append(marked)
        self._room[row] -= len(marked)
        if not self._room[row]:
            self._flush(row)

    def _flush(self, row: int) -> None:
        padding = np.zeros(self._room.pop(row), dtype=np.uint32)
        padding[:1] = OPENS  # padding sees no conversation
        self._writer.write(np.concatenate([*self._rows.pop(row), padding]))
