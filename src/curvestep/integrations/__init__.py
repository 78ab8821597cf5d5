"""Other people's training loops: Lightning and Hugging Face. Each module needs the extra of its name."""
