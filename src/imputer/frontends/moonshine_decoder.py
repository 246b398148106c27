"""The decoder of Moonshine (tiny) as a start for the layers of an Imputer with cross-attention, and for its vocabulary.

# DEPARTURE pretrained-decoder: the paper's layers start at random; see PAPER.md.

The decoder was trained to write the next token; over frames the same weights are asked what each frame says. What was
measured, with 4,000 pieces over the frozen encoder, CTC on 11 hours of speech, steps of 60 s:

- After 250 steps it has 43 % word errors on held-out speakers, after 500 steps 30 %. From random weights networks of
  this size took hours to get there: most of what a small corpus lacks, words and their spelling, is in these weights.
- A piece starts with the embedding of the same piece, one in lower case with that of its capitalised form if it has no
  other; all-masked frames start with the embedding of the beginning of a text, which is what the decoder reads there.
"""

import importlib.util
import math
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from imputer.errors import ImputerError, UsageError
from imputer.frontends.moonshine import asset, open_session
from imputer.frontends.trainable_moonshine import HEADS, WIDTH, halves, multiplied_out
from imputer.vocabulary import Vocabulary

LAYERS, FILTER_SIZE = 6, 1152
BEGIN = 1  # the token in front of every text
PROJECTION_SCALE = 0.15  # acoustic frames start about as large as embeddings
LONGEST = 16  # characters of a piece
PLAIN = re.compile(r"▁?[a-z']+|▁")


def read_tokens(path: Path | None = None) -> list[bytes]:
    """The pieces of Moonshine's tokenizer: each a length, in one byte or two, and as many bytes."""
    path = path or asset().parent / "tokenizer.bin"
    content, tokens, at = path.read_bytes(), [], 0
    while at < len(content):
        length, at = content[at], at + 1
        if length >= 128:
            length, at = content[at] * 128 + length - 128, at + 1
        tokens.append(content[at : at + length])
        at += length
    return tokens


def plain_pieces() -> dict[str, int]:
    """Pieces in lower case, and which token of Moonshine each is; capitalised ones where there is no other."""
    tokens = [token.decode("utf-8", "replace") for token in read_tokens()]
    found: dict[str, int] = {}
    for form in (str, str.lower):
        for number, token in enumerate(tokens):
            if PLAIN.fullmatch(piece := form(token)):
                found.setdefault(piece, number)
    return found


def vocabulary(texts: Iterable[str], size: int) -> Vocabulary:
    """The ``size`` pieces of Moonshine that spell ``texts`` best, most probable first."""
    words = Counter(word for text in texts for word in text.split())
    if not words:
        raise ImputerError("no text to choose a vocabulary by")
    known = plain_pieces()
    characters = {character for word in words for character in word} | {"▁"}
    if strange := sorted(characters - known.keys()):
        raise UsageError(
            f"vocabulary.units = moonshine spells plain text, lower-case letters and apostrophes, but the transcripts "
            f"have {strange[0]!r}; prepare them with --text plain"
        )
    # Fewest pieces first, frequent ones where that leaves a choice; then as probable as they were used.
    costs = {piece: 1 + 1e-5 * math.log(number + 2) for piece, number in known.items()}
    for keep in (len(known), len(known), size, size):
        counts: Counter[str] = Counter()
        for word, times in words.items():
            for piece in spelled(word, costs):
                counts[piece] += times
        rarest_last = sorted(costs, key=lambda piece: (piece not in characters, -counts[piece], piece))
        total = math.log(counts.total())
        costs = {piece: total - math.log(counts[piece] + 0.5) for piece in rarest_last[:keep]}
    return Vocabulary.of_pieces({piece: -cost for piece, cost in costs.items()})


def spelled(word: str, costs: Mapping[str, float]) -> list[str]:
    """The cheapest pieces that make up a word."""
    text = f"▁{word}"
    best, back = [0.0] + [math.inf] * len(text), [0] * (len(text) + 1)
    for end in range(1, len(text) + 1):
        for start in range(max(0, end - LONGEST), end):
            cost = best[start] + costs.get(text[start:end], math.inf)
            if cost < best[end]:
                best[end], back[end] = cost, start
    pieces, end = list[str](), len(text)
    while end:
        pieces.append(text[back[end] : end])
        end = back[end]
    return pieces[::-1]


def start(model: Any, vocabulary: Vocabulary) -> None:
    """Give an Imputer with cross-attention the decoder's layers, and the embeddings of the pieces it knows."""
    settings = model.settings
    wanted = {"width": WIDTH, "heads": HEADS, "filter_size": FILTER_SIZE}
    for name, value in wanted.items():
        if getattr(settings, name) != value:
            raise UsageError(
                f"model.{name} = {getattr(settings, name)}, but with model.cross_attention the layers start as those "
                f"of Moonshine's decoder, which need {value}"
            )
    weights, known = pretrained_weights(), plain_pieces()
    embedding = model.embedding.weight.data
    for token, piece in enumerate(vocabulary.pieces(range(1, vocabulary.size + 1)), 1):
        if piece in known:
            embedding[token] = weights["embedding"][known[piece]]
    embedding[model.blank] = 0
    embedding[model.mask] = weights["embedding"][BEGIN]
    model.norm.weight.data.copy_(weights["norm"])
    model.front_end.project.weight.data *= PROJECTION_SCALE
    for number, layer in enumerate(model.layers):
        if number >= LAYERS:
            layer.pass_through()
            continue
        prefix = f"layers.{number}."
        own = {name: tensor for name, tensor in layer.state_dict().items() if name.startswith("window_")}
        theirs = {name.removeprefix(prefix): t for name, t in weights.items() if name.startswith(prefix)}
        layer.load_state_dict(own | theirs)


def pretrained_weights() -> dict[str, Tensor]:
    """The decoder's weights out of the file in moonshine-voice: int8, multiplied out to float32."""
    if importlib.util.find_spec("onnx") is None:
        raise UsageError(
            "reading the weights of moonshine-voice needs the package onnx: pip install 'imputer-asr[english,export]'"
        )
    import onnx
    from onnx import numpy_helper

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "decoder.onnx"
        open_session(asset().parent / "decoder_model_merged.ort", 1, save_as=path)
        graph = onnx.load(path).graph
    # Two branches: with what earlier tokens left, and for the first token, which also reads the encoder's frames.
    branches = [a.g for node in graph.node if node.op_type == "If" for a in node.attribute]
    held = [graph, *branches]
    stored = {
        one.name: torch.from_numpy(numpy_helper.to_array(one).copy()) for g in held for one in g.initializer
    }
    nodes = [node for g in held for node in g.node]

    def product(name: str) -> Tensor:
        """The weight of a linear map, (output, input)."""
        return multiplied_out(nodes, stored, f"/model/decoder/{name}/MatMul_quant").T.contiguous()

    def plain(name: str) -> Tensor:
        return stored[f"model.decoder.{name}_merged_0"]

    weights = {"norm": plain("norm.weight")}
    quantised = stored["model.decoder.embed_tokens.weight_merged_0_quantized"]
    stem = "model.decoder.embed_tokens.weight_merged_0"
    weights["embedding"] = (quantised.float() - stored[f"{stem}_zero_point"].float()) * stored[
        f"{stem}_scale"
    ].float()
    for i in range(LAYERS):
        at = f"layers.{i}"
        query, key = (halves(product(f"{at}/self_attn/{name}_proj")) for name in "qk")
        read = [product(f"{at}/encoder_attn/{name}_proj") for name in "kv"]
        weights |= {
            f"{at}.attention_norm.weight": plain(f"{at}.input_layernorm.weight"),
            f"{at}.qkv.weight": torch.cat((query, key, product(f"{at}/self_attn/v_proj"))),
            f"{at}.attention_output.weight": product(f"{at}/self_attn/o_proj"),
            f"{at}.memory_norm.weight": plain(f"{at}.post_attention_layernorm.weight"),
            f"{at}.query.weight": product(f"{at}/encoder_attn/q_proj"),
            f"{at}.keys_values.weight": torch.cat(read),
            f"{at}.memory_output.weight": product(f"{at}/encoder_attn/o_proj"),
            f"{at}.filter_norm.weight": plain(f"{at}.final_layernorm.weight"),
            f"{at}.filter_in.weight": product(f"{at}/mlp/fc1"),
            f"{at}.filter_in.bias": plain(f"{at}.mlp.fc1.bias"),
            f"{at}.filter_out.weight": product(f"{at}/mlp/fc2"),
            f"{at}.filter_out.bias": plain(f"{at}.mlp.fc2.bias"),
        }
    return weights
