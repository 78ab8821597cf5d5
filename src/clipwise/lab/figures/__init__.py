"""The training figures of the paper, drawn from run folders alone."""

from clipwise.lab.figures.curves import curves as curves
from clipwise.lab.figures.data_fraction import (
    Agreement as Agreement,
    agreement as agreement,
    data_fraction as data_fraction,
)
from clipwise.lab.figures.heatmap import heatmap as heatmap
from clipwise.lab.figures.lstm_gd import Comparison as Comparison, compare as compare, lstm_gd as lstm_gd
from clipwise.lab.figures.scatter import scatter as scatter
from clipwise.lab.figures.style import save as save
