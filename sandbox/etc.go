// The reviewed lists of host paths that every agent may read. Nothing else of the
// host is part of the view in read mode system.

package sandbox

// systemTrees hold installed programs. A link among them (a merged /bin) stays a link.
var systemTrees = []string{
	"/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32",
	"/opt", "/nix", "/snap", "/home/linuxbrew/.linuxbrew",
}

// etcEntries are the parts of /etc that programs need to resolve users, names,
// certificates, time zones and their own defaults. Left out on purpose: shadow and
// sudoers, ssh host keys, wireguard and NetworkManager, fstab and crypttab, environment
// (it carries proxies with passwords), machine-id (it identifies the host), cron and
// systemd. resolv.conf and hosts are generated.
var etcEntries = []string{
	// users, groups, name services
	"passwd", "group", "nsswitch.conf", "host.conf", "gai.conf", "services", "protocols", "networks", "ethertypes", "rpc", "shells",
	// the dynamic linker
	"ld.so.cache", "ld.so.conf", "ld.so.conf.d",
	// certificates and crypto policy
	"ssl", "ca-certificates", "ca-certificates.conf", "pki", "crypto-policies", "gnutls",
	// what the system is, where it is, how it speaks
	"os-release", "debian_version", "lsb-release", "timezone", "localtime", "locale.alias", "locale.conf", "locale.gen", "default/locale",
	// alternatives and shells
	"alternatives", "profile", "profile.d", "bash.bashrc", "bash_completion.d", "zsh", "fish", "inputrc", "terminfo",
	// tools and language runtimes
	"gitconfig", "gitattributes", "mime.types", "magic", "mailcap", "papersize", "vim", "nanorc", "wgetrc", "npmrc", "xdg", "fonts",
	"java", "java-17-openjdk", "java-21-openjdk", "java-25-openjdk", "python3", "python3.11", "python3.12", "python3.13", "perl", "maven", "gradle",
	"ssh/ssh_config", "ssh/ssh_config.d", "ssh/ssh_known_hosts", "pip.conf", "R", "php", "ruby", "clang", "ImageMagick-6", "ImageMagick-7", "texmf",
}

// hostTops are the entries of / that read mode host leaves out: each is made anew, or hidden.
var hostTops = map[string]bool{
	"proc": true, "dev": true, "sys": true, "run": true, "tmp": true, "home": true, "root": true,
	"lost+found": true, "boot": true, "swapfile": true, "swap.img": true,
}
