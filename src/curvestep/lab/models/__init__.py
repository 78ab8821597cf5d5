"""The models of the experiments: two LSTM language models and two residual networks."""
