# A folder of our own in /tmp, whose names anybody can guess; read by the sites' .env files.
#
# own_folder PATH     prints PATH, made and readable by nobody else; if it belongs to another user, a new folder
#                     beside it, because we would run what lies in theirs
own_folder() {
    mkdir -m 700 "$1" 2> /dev/null
    if [[ -d $1 && ! -L $1 && -O $1 ]] && chmod 700 "$1"; then
        echo "$1"
        return
    fi
    [[ -e $1 || -L $1 ]] && echo "$1 belongs to somebody else: a new folder beside it is used" >&2
    mktemp -d "$1.XXXXXXXX" || echo "no folder can be made in ${1%/*}: is it full?" >&2
}
