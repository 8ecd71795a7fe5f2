"""Whether two answers are the same mathematics.

answers.py finds the answer in a completion. text.py writes it in one spelling, forms.py reads it as numbers, sets,
intervals, matrices, relations or words, parser.py as an expression. compare.py compares forms; for expressions it asks
an oracle, cheapest first: normal forms over exact rationals (normal_form.py), floating point with error bounds, which
can only refute (floating.py), and in a killable child many digits (precise.py) and sympy (symbolic.py). No text is ever
handed to eval, nor to a parser that does.
"""
