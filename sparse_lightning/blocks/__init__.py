"""Views of parameters, blocks, couplings and scopes; reductions over blocks and masks applied to them."""
