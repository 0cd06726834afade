# A private folder in /tmp, where anybody may guess and take its name; read by the sites' .env files.
#
# own_folder PATH     makes PATH, readable by nobody else, and prints it; if it belongs to another user, a new folder
#                     beside it, because we would run the code in theirs
own_folder() {
    mkdir -m 700 "$1" 2> /dev/null
    if [[ -d $1 && ! -L $1 && -O $1 ]] && chmod 700 "$1"; then
        echo "$1"
        return
    fi
    [[ -e $1 || -L $1 ]] && echo "$1 belongs to somebody else: a new folder beside it is used" >&2
    mktemp -d "$1.XXXXXXXX" || echo "no folder can be made in ${1%/*}: is it full?" >&2
}
