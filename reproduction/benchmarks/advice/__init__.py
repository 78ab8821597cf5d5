"""What advise is worth: regret after following it, over learning rates three decades wide."""
