#!/bin/sh
# Qwen Code: npm install @qwen-code/qwen-code
export HOME="$TMPDIR"
exec qwen --auth-type openai --model "$POLICYGRAD_MODEL" --approval-mode yolo < "$POLICYGRAD_PROMPT"
