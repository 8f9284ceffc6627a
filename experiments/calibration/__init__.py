"""The benchmark of calibration: many data sets, the same networks for all methods, one table of scores."""
