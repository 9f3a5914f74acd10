#!/bin/sh
cd "$(dirname "$0")/.."
if [ "$(cat app/greeting)" = hello ]; then echo 1; else echo 0; fi > logs/verifier/reward.txt
