"""Results and how they are shown: records of any metric, and the tables, plots and pages that are made of them.

`metrics` says what can be measured, `records` what one model scored, `layout` which records may stand in one table.
`tables`, `plots` and `report` show layouts and know nothing else: no model, no configuration, no corpus.
"""
