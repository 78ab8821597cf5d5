"""The training figures of the paper, drawn from run folders alone."""

from curvestep.lab.paper.curves import curves as curves
from curvestep.lab.paper.data_fraction import (
    Agreement as Agreement,
    agreement as agreement,
    data_fraction as data_fraction,
)
from curvestep.lab.paper.lstm_gd import Comparison as Comparison, compare as compare, lstm_gd as lstm_gd
from curvestep.lab.paper.scatter import scatter as scatter
from curvestep.lab.paper.style import save as save
