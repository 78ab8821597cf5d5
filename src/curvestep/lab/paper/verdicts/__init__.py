"""What of the paper holds: the rule, the rows, the judges and their statistics."""
