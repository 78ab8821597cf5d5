"""Other people's training loops, Lightning and Hugging Face, and where rows are logged.

``lightning`` and ``transformers`` need the extra of their name; ``loggers`` needs none.
"""

from curvestep.integrations import loggers as loggers
