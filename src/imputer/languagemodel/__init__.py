"""Token n-grams over a model's own pieces, hotwords, and decoding with both.

counts      n-grams of a stream of texts, by sorting
kneserney   modified Kneser-Ney and pruning
trie        the compact form, and the compiled walk through it
ngrams      LanguageModel: load, save, score; build
arpa        the text form of KenLM and SRILM
texts       text files in the form that models write
beam        the compiled search over what imputation leaves open
hotwords    a bonus for words that are expected
fusion      imputation, then the search
"""

from imputer.languagemodel.arpa import read_arpa, write_arpa
from imputer.languagemodel.ngrams import LanguageModel, build

__all__ = ["LanguageModel", "build", "read_arpa", "write_arpa"]
