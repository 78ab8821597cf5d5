"""The models of the experiments: two LSTM language models and two residual networks."""

from curvestep.lab.models.lstm import (
    AWDLSTM as AWDLSTM,
    Activations as Activations,
    LSTMModel as LSTMModel,
    State as State,
    activation_penalty as activation_penalty,
    random_bptt_length as random_bptt_length,
)
from curvestep.lab.models.resnet import (
    GlobalBatchNorm2d as GlobalBatchNorm2d,
    ResNet18 as ResNet18,
    ResNet20 as ResNet20,
)
