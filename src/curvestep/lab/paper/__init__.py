"""The training figures of the paper, drawn from run folders alone."""

from curvestep.display.drawing import save as save
from curvestep.lab.paper.fig1_scatter import scatter as scatter
from curvestep.lab.paper.fig4_curves import curves as curves
from curvestep.lab.paper.fig6_data_fraction import (
    Agreement as Agreement,
    agreement as agreement,
    data_fraction as data_fraction,
)
from curvestep.lab.paper.fig8_lstm_gd import Comparison as Comparison, compare as compare, lstm_gd as lstm_gd
