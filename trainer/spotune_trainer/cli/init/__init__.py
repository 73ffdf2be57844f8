"""`spotune init`: writes a job file for rows and a model.

Reading the rows (`columns`), the model (`model`) and the machine (`machine`) is apart from the decisions, which are
pure functions (`formats`, `decisions`, `hyperparameters`). `job_file` writes them as YAML with a comment for each.
"""
