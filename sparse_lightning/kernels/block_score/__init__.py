"""block_score: a stage of elementwise steps on windows, folded over the elements of each block into grids."""
