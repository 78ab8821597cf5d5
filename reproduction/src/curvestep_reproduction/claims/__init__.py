"""Verdicts on the paper's claims: the rule, the rows, the judges and their statistics."""
