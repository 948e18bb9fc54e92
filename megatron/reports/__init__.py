"""Records of results, and the tables, plots, and pages built from them.

`metrics` defines the metrics, `records` the results of a model, and `comparison_table` which records share a table.
Tables, plots, and pages depend only on these, not on models, configurations, or corpora.
"""
