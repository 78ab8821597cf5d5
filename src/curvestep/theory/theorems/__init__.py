"""The paper's theorems as functions: recipe, bound and assumptions, printed, corrected and sharp."""
