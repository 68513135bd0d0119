"""Results of other libraries as `Quantized`, and `Quantized` in the conventions of other libraries.

`quantized` reads codes, scales and tensor scale in the conventions that its keyword arguments name, and `stored_as`
writes them. `CONVENTIONS` is the table of all conventions. These functions accept everything that `tensor` accepts.
"""

from __future__ import annotations

from narrowgauge.adapt.conventions import CONVENTIONS, AnyLayout, Convention, Layout, Nibbles, TensorScaleIs
from narrowgauge.adapt.convert import padding, quantized, stored_as
from narrowgauge.adapt.entries import ENTRIES, Entry, Part, entries_of, entry_parts
from narrowgauge.adapt.marlin import MarlinScales, from_marlin_scales, marlin_scales
from narrowgauge.adapt.tensors import tensor
from narrowgauge.adapt.words import WORDS, WordLayout, integers, pack_words, unpack_words

__all__ = [
    "CONVENTIONS", "ENTRIES", "WORDS", "AnyLayout", "Convention", "Entry", "Layout", "MarlinScales", "Nibbles", "Part",
    "TensorScaleIs", "WordLayout", "entries_of", "entry_parts", "from_marlin_scales", "integers", "marlin_scales",
    "pack_words", "padding", "quantized", "stored_as", "tensor", "unpack_words",
]  # fmt: skip
