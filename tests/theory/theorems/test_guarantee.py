"""Guarantees as sentences."""

from curvestep.theory.theorems.clipped_gd import theorem3
from curvestep.theory.theorems.fixed_gd import remark5


def test_a_guarantee_reads_as_a_sentence():
    text = str(theorem3(L0=1.0, L1=2.0, gap=1.0, eps=0.1))
    assert text.startswith("Theorem 3 (corrected): it takes at most 2000 iterations")
    assert "at least of order" in str(remark5(L0=1.0, L1=5.0, M=50.0, gap=12.0, eps=0.1))
