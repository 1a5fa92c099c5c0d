"""Operations on a model and its optimizer that are the same for all strategies."""
