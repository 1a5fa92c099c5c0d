"""Models drawn from a grammar: each is trained as one process would train it, or refused.

`grammar` writes a model as a task's file, `pool` runs the command line on processes that stay,
`check` compares with plain torch and finds the smallest model that fails.
"""
