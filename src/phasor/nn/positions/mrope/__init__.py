"""Multi-section rotary positions (mRoPE) over time, height and width."""
