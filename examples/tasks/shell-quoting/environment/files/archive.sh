#!/bin/bash
count=0
mkdir -p $2
for file in $(ls $1 | grep .txt); do
    cp $1/$file $2
    count=$((count + 1))
done
echo $count
