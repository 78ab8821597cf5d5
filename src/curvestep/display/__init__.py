"""How results are shown: charts as data, figures by matplotlib, tables for notebooks, one HTML page."""
