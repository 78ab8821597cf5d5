"""Why a step raised the loss: the last steps are kept, and taken again with one thing changed at a time."""
