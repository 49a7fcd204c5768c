# bash completion for rekindle
_rekindle() {
    local IFS=$'\013' words=() word option='' i
    # readline breaks --store=DIR into three words.
    for ((i = 0; i <= COMP_CWORD; i++)); do
        word=${COMP_WORDS[i]}
        if ((i > 1)) && [[ ($word == = || ${COMP_WORDS[i - 1]} == =) && ${words[-1]} == --* ]]; then
            words[-1]+=$word
        else
            words+=("$word")
        fi
    done
    [[ ${words[-1]} != --*=* ]] || option=${words[-1]%%=*}=
    COMPREPLY=($(_CLAP_IFS=$IFS _CLAP_COMPLETE_INDEX=$((${#words[@]} - 1)) _REKINDLE_COMPLETE=bash \
        rekindle -- "${words[@]}" 2>/dev/null))
    # readline replaces what is after the sign.
    COMPREPLY=("${COMPREPLY[@]#"$option"}")
    if [[ ${COMPREPLY-} == *[=/] ]]; then
        compopt -o nospace 2>/dev/null
    fi
}
complete -o bashdefault -o default -o nosort -F _rekindle rekindle 2>/dev/null ||
    complete -o bashdefault -o default -F _rekindle rekindle
