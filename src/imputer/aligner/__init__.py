"""Forced alignment: the time of every token of a known text, for recordings and for whole corpora."""
